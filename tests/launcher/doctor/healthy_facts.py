"""Facts of a host with which all is well, for tests to spoil."""

from __future__ import annotations

from collectived_launcher.doctor.facts import (
    Clock,
    Environment,
    Facts,
    Folder,
    GpuFacts,
    Gpus,
    InterfaceFacts,
    Kernel,
    Library,
    LimitFacts,
    MemoryFacts,
    NcclFacts,
    NetworkFacts,
    PathMeasurement,
    PeerFacts,
    Port,
    RunningJob,
    Software,
)

SOFTWARE = Software(
    "0.1.0",
    "3.12.4",
    ">=3.11",
    (Library("grpcio", "1.85.1", ">=1.74"), Library("numpy", "2.4.6", ">=2.0"), Library("click", "8.5", ">=8.1")),
)
KERNEL = Kernel("Linux", "6.8.0")
LIMITS = LimitFacts(descriptors=65536, descriptors_most=None, locked=None, tasks_left=None)
MEMORY = MemoryFacts(total=64 << 30, available=60 << 30)
FOLDER = Folder("/run/user/7/collectived", 7, 0o700, True, True, 7, 60)
ENVIRONMENT = Environment({})
NO_GPU = Gpus()
H100 = Gpus(
    cards=2,
    driver="580.65.06",
    cuda="13.0",
    devices=(GpuFacts(0, "NVIDIA H100", "GPU-aa", 80 << 30), GpuFacts(1, "NVIDIA H100", "GPU-ab", 80 << 30)),
)
NCCL = NcclFacts("", {"nccl4py": "0.6.0"}, "2.28.9")
ETHERNET = InterfaceFacts("eth0", "10.0.0.2", 10000)
NETWORK = NetworkFacts("a", (InterfaceFacts("lo", "127.0.0.1"), ETHERNET), "10.0.0.2")
PORTS = (Port(7450, "coordinator"), Port(7451, "worker (gRPC)"))
JOB = RunningJob("user-1-ab", {"coordinator": "0.1.0", "worker 0": "0.1.0"}, 0.0001, 0.001)
PEER = PeerFacts("b", "0.1.0", "3.12.1", {"numpy": "2.4.6", "grpcio": "1.85.1"})
MEASURED = PathMeasurement("10.0.0.3:4000", PEER, 0.0002, 0.001, 1.1e9, 1.0e9, ETHERNET)
SOUND = Facts(
    SOFTWARE, KERNEL, LIMITS, MEMORY, FOLDER, ENVIRONMENT, (), NO_GPU, NCCL, NETWORK, PORTS, Clock(True), (JOB,)
)
