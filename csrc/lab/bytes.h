/* SPDX-License-Identifier: Apache-2.0
 *
 * bytes.h: numbers in entries of queues, at any address, in the byte order that the NIC has them in.
 */
#ifndef UCCL_EP_LAB_BYTES_H
#define UCCL_EP_LAB_BYTES_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

/* be32_at(at) reads, put_be32(at, value) writes; and so on. */
#define LAB_BYTES_(order, bits)                                                                                        \
    static inline uint##bits##_t order##bits##_at(const uint8_t *at) {                                                 \
        uint##bits##_t value;                                                                                          \
        memcpy(&value, at, sizeof value);                                                                              \
        return order##bits##toh(value);                                                                                \
    }                                                                                                                  \
    static inline void put_##order##bits(uint8_t *at, uint##bits##_t value) {                                          \
        value = hto##order##bits(value);                                                                               \
        memcpy(at, &value, sizeof value);                                                                              \
    }
LAB_BYTES_(be, 16)
LAB_BYTES_(be, 32)
LAB_BYTES_(be, 64)
LAB_BYTES_(le, 64)
#undef LAB_BYTES_

#endif
