/* A driver with two GPUs, as far as doctor asks: `cc -shared -fPIC -o libnvidia-ml.so.1 nvml.c`. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int nvmlInit_v2(void) {
    if (getenv("HANGS")) sleep(60);
    return getenv("REFUSES") ? 18 : 0;
}
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "?"; }
int nvmlSystemGetDriverVersion(char *room, unsigned size) { return snprintf(room, size, "580.65.06") < 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) { memory[0] = 80ull << 30; return 0; }
int nvmlDeviceGetName(void *handle, char *room, unsigned size) { return snprintf(room, size, "NVIDIA H100") < 0; }
int nvmlDeviceGetUUID(void *handle, char *room, unsigned size) {
    return snprintf(room, size, "GPU-%ld", (long)handle) < 0;
}
