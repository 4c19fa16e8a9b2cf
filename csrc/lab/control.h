/* SPDX-License-Identifier: Apache-2.0
 *
 * control.h: what the parts of the control path (preload, uverbs, ioctl, objects, events) know of each other.
 *
 * A context is one open file of a device: descriptors made by dup() are the same context, and it ends with the last of
 * them. Its objects have handles in one table of their own, of all kinds, as the kernel has it; a handle of another
 * kind, or of another context, is EINVAL.
 */
#ifndef UCCL_EP_LAB_CONTROL_H
#define UCCL_EP_LAB_CONTROL_H

#include <signal.h>
#include <sys/types.h>

#include "lab.h"

#define LAB_MAX_FDS 65536u       /* descriptors of a process that may be a device's */
#define LAB_MAX_HANDLES 1048576u /* of a context */

/* -------------------------------------------------------------------------------------------------------- objects.c */

enum lab_kind { LAB_PD = 1, LAB_MR, LAB_CQ, LAB_SRQ, LAB_QP, LAB_AH };

/* All with lab_lock held. NULL and errno. */
lab_context *lab_context_new(lab_device *device, int fd);
void lab_context_free(lab_context *context); /* with everything in it, users first */

/* A zeroed object with a handle; NULL: no memory (or none left to number). Numbers and keys are set. The object is
 * found by others only after lab_publish. */
void *lab_new(lab_context *context, enum lab_kind kind);
void lab_publish(lab_context *context, enum lab_kind kind, void *object);
/* What it was made of may go again. Never fails: EBUSY has been asked before. */
void lab_free(lab_context *context, enum lab_kind kind, void *object);
void *lab_find(lab_context *context, enum lab_kind kind, uint32_t handle); /* NULL: there is none */
lab_ah *lab_find_ah(lab_context *context, uint32_t handle);
lab_mr *lab_find_mr(lab_context *context, uint32_t handle);
/* Objects that need this one; destroying it is EBUSY until they are gone. */
uint32_t lab_users(lab_context *context, uint32_t handle);
void lab_use(lab_context *context, uint32_t handle, int change);
/* Asynchronous events reported of the object with this user handle. False: there is none. */
bool lab_event_count(lab_context *context, enum lab_kind kind, uint64_t element);
/* Before it is destroyed: how many of them the program has read. The others are withdrawn. */
uint32_t lab_events(lab_context *context, uint32_t handle);
/* Gives the object back whole: model, NIC, table. */
int lab_destroy(lab_context *context, enum lab_kind kind, uint32_t handle);

/* After fork(), in the child: nothing of the parent's is known any more. */
void lab_objects_forget(void);

/* --------------------------------------------------------------------------------------------------------- events.c */

int lab_pipe(int ends[2]); /* the reading end as the kernel's event descriptors: blocking, one event a read() */
lab_channel *lab_channel_new(lab_context *context);
lab_channel *lab_channel_of_fd(const lab_context *context, int fd);
/* Before the queue is destroyed: how many of its events the program has read; the others are withdrawn. */
uint32_t lab_cq_events(lab_cq *cq);
uint32_t lab_async_withdraw(const lab_context *context, enum lab_kind kind, uint64_t element); /* how many */
void lab_channels_free(const lab_context *context);
void lab_channels_forget(void);

/* ----------------------------------------------------------------------------------------------------------- trap.c */

bool lab_trapping(void); /* the handler of SIGSEGV is ours */
/* What sigaction(SIGSEGV) means then: who gets the faults that are not ours. */
void lab_trap_chain(const struct sigaction *action, struct sigaction *old);
void lab_trap_unmapped(uintptr_t start, size_t bytes);
void lab_traps_forget(void);

/* ------------------------------------------------------------------------------------------------- uverbs.c, ioctl.c
 */

/* The answer to write() and ioctl() of a device: >= 0, or a negative errno. With lab_lock held. */
ssize_t lab_uverbs_write(lab_context *context, const void *bytes, size_t n);
int lab_uverbs_ioctl(lab_context *context, unsigned long request, void *argument);

/* Registration, which both have. Fills in *mr. */
struct lab_registration {
    uint32_t pd, access;
    uint64_t start, iova, length;
    int dmabuf; /* -1: none; `start` is then the offset in it */
};
int lab_register(lab_context *context, const struct lab_registration *wanted, struct lab_call *call, lab_mr **mr);
struct ib_uverbs_query_port_resp;
int lab_query_port(const lab_context *context, uint32_t port, struct ib_uverbs_query_port_resp *reply);

#endif
