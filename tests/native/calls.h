/* SPDX-License-Identifier: Apache-2.0
 *
 * calls.h: a call of the library that has to succeed, or to fail in one way.
 */
#ifndef UCCL_EP_TEST_CALLS_H
#define UCCL_EP_TEST_CALLS_H

#include "testing.h"
#include "uccl_ep/uccl_ep.h"

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        const int ok_status_ = (call);                                                                                 \
        CHECK(ok_status_ == UCCL_EP_OK, "%s: %s", uccl_ep_status_name(ok_status_), uccl_ep_last_error()->text);        \
    } while (0)

#define EXPECT(call, expected)                                                                                         \
    do {                                                                                                               \
        const int got_status_ = (call);                                                                                \
        CHECK(got_status_ == (expected), "got %s (%s), expected %s", uccl_ep_status_name(got_status_),                 \
              uccl_ep_last_error()->text, uccl_ep_status_name(expected));                                              \
    } while (0)

#endif
