/* compression_binding.h: what Python sees of compression.h. */
#ifndef COLLECTIVED_COMPRESSION_BINDING_H
#define COLLECTIVED_COMPRESSION_BINDING_H

#include "stable_abi.h"

extern PyMethodDef compression_functions[];

#endif
