/* SPDX-License-Identifier: Apache-2.0
 *
 * error.c: what went wrong, kept for the thread that asked.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static _Thread_local uccl_ep_error last_error = {.size = sizeof(uccl_ep_error),
                                                 .peer = UCCL_EP_ANY_RANK,
                                                 .rank = UCCL_EP_ANY_RANK,
                                                 .channel = UCCL_EP_NO_CHANNEL,
                                                 .ticket = UCCL_EP_NO_TICKET};
static _Thread_local char fail_text[256];
static _Thread_local int32_t fail_code;

uccl_ep_error *last_error_slot(void) {
    return &last_error;
}

const uccl_ep_error *uccl_ep_last_error(void) {
    return &last_error;
}

uccl_ep_status fail_local(uccl_ep_status status, const char *clause, const char *format, ...) {
    last_error = (uccl_ep_error){.size = sizeof(uccl_ep_error),
                                 .status = status,
                                 .rank = UCCL_EP_ANY_RANK,
                                 .peer = UCCL_EP_ANY_RANK,
                                 .channel = UCCL_EP_NO_CHANNEL,
                                 .ticket = UCCL_EP_NO_TICKET};
    snprintf(last_error.clause, sizeof last_error.clause, "%s", clause);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error.text, sizeof last_error.text, format, arguments);
    va_end(arguments);
    return status;
}

void fail_with_record(const uccl_ep_error *record) {
    last_error = *record;
}

uccl_ep_status host_fail(void *context, uccl_ep_status status, int32_t vendor_code, const char *text) {
    (void)context;
    fail_code = vendor_code;
    snprintf(fail_text, sizeof fail_text, "%s", text ? text : "");
    return status;
}

const char *host_fail_text(void) {
    return fail_text;
}
int32_t host_fail_code(void) {
    return fail_code;
}
void host_fail_clear(void) {
    fail_text[0] = 0;
    fail_code = 0;
}

uccl_ep_status checked_status(uccl_ep_status status) {
    return status < 0 && strcmp(uccl_ep_status_name(status), "unknown") ? status : UCCL_EP_E_BACKEND;
}

const char *uccl_ep_status_name(int32_t status) {
    switch (status) {
#define NAME(name, value, text)                                                                                        \
    case value:                                                                                                        \
        return #name;
        UCCL_EP_STATUS_TABLE(NAME)
#undef NAME
    default:
        return "unknown";
    }
}

const char *uccl_ep_status_text(int32_t status) {
    switch (status) {
#define TEXT(name, value, text)                                                                                        \
    case value:                                                                                                        \
        return text;
        UCCL_EP_STATUS_TABLE(TEXT)
#undef TEXT
    default:
        return "not a status of uccl_ep";
    }
}

#define STRING_(x) #x
#define STRING(x) STRING_(x)
const char *uccl_ep_version(void) {
    return STRING(UCCL_EP_VERSION_MAJOR) "." STRING(UCCL_EP_VERSION_MINOR) "." STRING(UCCL_EP_VERSION_PATCH);
}

uint32_t uccl_ep_backend_abi(void) {
    return UCCL_EP_BACKEND_ABI_MAJOR << 16 | UCCL_EP_BACKEND_ABI_MINOR;
}

void uccl_ep_assert_failed(const char *condition, const char *file, int line) {
    fprintf(stderr, "uccl_ep: broken invariant: %s (%s:%d)\n", condition, file, line);
    abort();
}

/* A child of fork shares the parent's mappings and sockets, but not its threads: it must not touch them. */
static _Atomic uint32_t fork_generation;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static void in_child(void) {
    atomic_fetch_add(&fork_generation, 1);
}
static void install_fork_handler(void) {
    pthread_atfork(NULL, NULL, in_child);
}

uint32_t current_fork_generation(void) {
    pthread_once(&fork_once, install_fork_handler);
    return atomic_load_explicit(&fork_generation, memory_order_relaxed);
}

uccl_ep_status check_usable(uccl_ep_comm *comm) {
    if (UNLIKELY(!comm)) return fail_local(UCCL_EP_E_INVALID, "", "the communicator is NULL");
    if (UNLIKELY(comm->fork_generation != atomic_load_explicit(&fork_generation, memory_order_relaxed)))
        return fail_local(UCCL_EP_E_FORKED, "",
                          "the communicator belongs to the parent process: create one after fork");
    if (UNLIKELY(atomic_load_explicit(&comm->aborted, memory_order_acquire)) && !FAULT(abort_ignored))
        return fail_local(UCCL_EP_E_ABORTED, "ABT-1", "the communicator was aborted: %s", comm->abort_reason);
    return UCCL_EP_OK;
}
