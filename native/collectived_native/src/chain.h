/* chain.h: what all workers of a group have agreed on so far. */
#ifndef COLLECTIVED_CHAIN_H
#define COLLECTIVED_CHAIN_H

#include "layout.h"

enum { CHAIN_BYTES = 8, MOST_CONTRACT = 64 };

/* The chain after one more collective, of which the contract has so many bytes, at most MOST_CONTRACT. */
void next_chain(unsigned char chain[CHAIN_BYTES], const void *contract, size_t bytes);

#endif
