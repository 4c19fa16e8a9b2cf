/* SPDX-License-Identifier: Apache-2.0
 *
 * status.h: the result of every call of uccl_ep, on the host, in a backend and on a device.
 *
 * Zero is success, positive values are states that are no error, negative values are errors. The errors lie in a range
 * of their own (-7000 and below), so that none is mistaken for an errno, a verbs or a libfabric code. Values are part
 * of the ABI: they are appended, never renumbered.
 *
 * Compiles as C11, C++17, CUDA, HIP and under run-time compilers (it includes nothing).
 */
#ifndef UCCL_EP_STATUS_H
#define UCCL_EP_STATUS_H

/* One row an outcome: X(name, value, what it means and what to do). */
#define UCCL_EP_STATUS_TABLE(X)                                                                                        \
    X(OK, 0, "success")                                                                                                \
    X(IN_PROGRESS, 1, "not finished yet: ask again")                                                                   \
    X(E_INVALID, -7001, "an argument is not valid: correct the call")                                                  \
    X(E_RANGE, -7002, "an offset, length, rank, slot or channel lies outside what was configured")                     \
    X(E_ALIGNMENT, -7003, "an offset or length is not a multiple of the channel's granularity")                        \
    X(E_MALFORMED, -7004, "the ring holds a command that no encoder produces: find who writes into the ring")          \
    X(E_DEADLINE, -7005, "the deadline passed: see the flight recorder for what was outstanding")                      \
    X(E_PEER_LOST, -7006, "the peer died or stopped answering: exclude it, or reset it once it answers again")         \
    X(E_CLOSED, -7007, "the channel, or the channel towards this target, was closed by an earlier failure")            \
    X(E_ABORTED, -7008, "the communicator was aborted: only closing it is allowed")                                    \
    X(E_REGISTRATION, -7009, "memory could not be registered with the NIC: the record says what would make it work")   \
    X(E_CAPABILITY, -7010, "the NIC does not promise what was asked for")                                              \
    X(E_ABI, -7011, "the backend, or the accelerator, was built for another version of its interface")                 \
    X(E_NOT_A_BACKEND, -7012, "the library is no backend, or no accelerator, of uccl_ep")                              \
    X(E_NO_DEVICE, -7013, "no such NIC, or no such GPU, on this machine")                                              \
    X(E_NO_MEMORY, -7014, "not enough memory, address space or locked memory")                                         \
    X(E_BOOTSTRAP, -7015, "the ranks could not be brought together")                                                   \
    X(E_NIC, -7016, "the NIC reported an error: the record holds the vendor's code and text")                          \
    X(E_BACKEND, -7017, "the backend broke its interface: report it to the backend's author")                          \
    X(E_FORKED, -7018, "a communicator was used in a child process of the one that made it")                           \
    X(E_AGAIN, -7019, "no room at this moment: nothing was taken, try again later")                                    \
    X(E_SYSTEM, -7020, "the operating system refused: the record holds errno and the call")                            \
    X(E_UNSUPPORTED, -7021, "not supported: the record says what is")

typedef enum uccl_ep_status {
#define UCCL_EP_STATUS_ENUM_(name, value, text) UCCL_EP_##name = (value),
    UCCL_EP_STATUS_TABLE(UCCL_EP_STATUS_ENUM_)
#undef UCCL_EP_STATUS_ENUM_
} uccl_ep_status;

#endif
