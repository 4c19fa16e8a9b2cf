/* SPDX-License-Identifier: Apache-2.0
 *
 * fault.h: named places where this backend can be broken on purpose, as core/fault_point.h has them: the constant 0 in
 * the library that users load. In the one that tests load the environment variable UCCL_EP_EFA_FAULT names one:
 *
 *   no_receives    immediates that take receives find none
 *   late_handle    a peer's address handle is made when something is first sent to it
 *   unsignalled    requests do not ask for a completion
 *   past_queue     requests are taken beyond what the queue holds
 *   small_queue    the completion queue has no room for immediates
 *   old_immediates immediates of an earlier connection are told
 */
#ifndef UCCL_EP_EFA_FAULT_H
#define UCCL_EP_EFA_FAULT_H

#ifndef UCCL_EP_FAULT_POINTS
#define EFA_FAULT(name) 0
#else
#include <stdlib.h>
#include <string.h>

static inline int efa_fault(const char *name) {
    const char *chosen = getenv("UCCL_EP_EFA_FAULT");
    return chosen && !strcmp(chosen, name);
}
#define EFA_FAULT(name) efa_fault(#name)
#endif

#endif
