/* SPDX-License-Identifier: Apache-2.0
 *
 * fault.h: named places where these backends can be broken on purpose, as core/fault_point.h has them: the constant 0
 * in the libraries that users load. In a second build of some (libuccl_ep_backend_X_faults.so), which tests and
 * `uccl-ep mutants` load, the environment variable UCCL_EP_BACKEND_FAULT names one. Most break a rule of the vendor's:
 * what tells of it is the vendor's own library or the NIC.
 */
#ifndef UCCL_EP_VERBS_FAULT_H
#define UCCL_EP_VERBS_FAULT_H

/* X(name, clause that it breaks, what it does). All but the last are EFA's. */
#define UCCL_EP_BACKEND_FAULT_TABLE(X)                                                                                 \
    X(no_receives, "SIG-1", "immediates that take receives find none")                                                 \
    X(not_unsolicited, "SIG-1", "immediates go to a queue pair that takes none without a receive, and has none")       \
    X(late_handle, "PUT-2", "a peer's address handle is made when something is first sent to it")                      \
    X(unsignalled, "QUI-1", "requests do not ask for a completion")                                                    \
    X(small_queue, "PRG-1", "the completion queue has no room for immediates")                                         \
    X(old_immediates, "ERR-6", "immediates of an earlier connection are told")                                         \
    X(past_queue, "PUT-1", "a queue holds fewer requests than are posted, and nobody counts them")                     \
    X(responders_unshared, "MEM-1", "each queue pair asks for all responder resources that the NIC has")

#ifndef UCCL_EP_FAULT_POINTS
#define VERBS_FAULT(name) 0
#else
#include <stdlib.h>
#include <string.h>

enum verbs_fault {
#define UCCL_EP_BACKEND_FAULT_ENUM_(name, clause, text) VERBS_FAULT_##name,
    UCCL_EP_BACKEND_FAULT_TABLE(UCCL_EP_BACKEND_FAULT_ENUM_)
#undef UCCL_EP_BACKEND_FAULT_ENUM_
        VERBS_FAULT_COUNT
};

static inline int verbs_fault(enum verbs_fault fault) {
#define UCCL_EP_BACKEND_FAULT_NAME_(name, clause, text) #name,
    static const char *const names[] = {UCCL_EP_BACKEND_FAULT_TABLE(UCCL_EP_BACKEND_FAULT_NAME_)};
#undef UCCL_EP_BACKEND_FAULT_NAME_
    const char *chosen = getenv("UCCL_EP_BACKEND_FAULT");
    return chosen && !strcmp(chosen, names[fault]);
}
#define VERBS_FAULT(name) verbs_fault(VERBS_FAULT_##name)
#endif

#endif
