/* chain.c: what all workers have agreed on after one more collective: BLAKE2b of the chain before and the contract, in
 * eight bytes. One block is enough (RFC 7693; `transport/frame.py` computes the same). */
#include "chain.h"

#include <string.h>

enum { ROUNDS = 12, BLOCK = 128 };

static const u64 START[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};
static const unsigned char ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static u64 turn(u64 word, int bits) {
    return word >> bits | word << (64 - bits);
}

static void mix(u64 v[16], int a, int b, int c, int d, u64 x, u64 y) {
    v[a] += v[b] + x, v[d] = turn(v[d] ^ v[a], 32);
    v[c] += v[d], v[b] = turn(v[b] ^ v[c], 24);
    v[a] += v[b] + y, v[d] = turn(v[d] ^ v[a], 16);
    v[c] += v[d], v[b] = turn(v[b] ^ v[c], 63);
}

static u64 read_word(const unsigned char *bytes) { /* little-endian */
    u64 word = 0;
    for (int i = 8; i--;) word = word << 8 | bytes[i];
    return word;
}

void next_chain(unsigned char chain[CHAIN_BYTES], const void *contract, size_t bytes) {
    unsigned char block[BLOCK] = {0};
    memcpy(block, chain, CHAIN_BYTES);
    memcpy(block + CHAIN_BYTES, contract, bytes);
    u64 m[16], v[16], parameters = 0x01010000u | CHAIN_BYTES;
    for (int i = 0; i < 16; i++) m[i] = read_word(block + 8 * i);
    for (int i = 0; i < 8; i++) v[i] = v[i + 8] = START[i];
    v[0] ^= parameters, v[12] ^= CHAIN_BYTES + bytes, v[14] = ~v[14];
    for (int round = 0; round < ROUNDS; round++) {
        const unsigned char *s = ORDER[round % 10];
        for (int i = 0; i < 4; i++) mix(v, i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    u64 word = START[0] ^ parameters ^ v[0] ^ v[8];
    for (int i = 0; i < CHAIN_BYTES; i++) chain[i] = (unsigned char)(word >> 8 * i);
}
