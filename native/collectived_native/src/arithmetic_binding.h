/* arithmetic_binding.h: what Python sees of arithmetic.h. */
#ifndef COLLECTIVED_ARITHMETIC_BINDING_H
#define COLLECTIVED_ARITHMETIC_BINDING_H

#include "stable_abi.h"

extern PyMethodDef arithmetic_methods[];

#endif
