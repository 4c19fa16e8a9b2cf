/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_ibverbs.h: an InfiniBand library made of software, for tests alone: what a test may ask of it.
 *
 * It is a libibverbs.so.1 with one provider. Its devices, their queue pairs and their wire are memory of the process
 * that loads it, so the ranks that talk to each other are threads of one process, or take turns in one; where
 * FAKE_IBVERBS_WIRE gives a name, they may be processes of one machine that gave the same. It does what
 * the documentation of the verbs asks (states, masks of attributes, keys, rights, depths, flushes) and refuses the
 * rest, also where hardware would let it pass.
 *
 * FAKE_IBVERBS names the devices: "NAME,key=value,...;NAME,...". A name's beginning gives the kind: mlx5, bnxt_re,
 * ionic, efa, rxe; KEYS are in config.c. Read by every ibv_get_device_list; a device that is still named is the same
 * one. FAKE_IBVERBS_SEED: of the order in which queue pairs are served. SYSFS_PATH is honoured as by the real library.
 *
 * The wire. What is posted waits. Whoever polls a completion queue, of any device, lets the wire carry out some of what
 * waits, of any queue pair (`lazy=0`: all of it when it is posted). So nothing is done before it is posted, nothing
 * twice, and in order on a queue pair; and a process in which nobody polls stands still.
 *
 * EFA (efa): datagrams, through libefa.so.1 beside this library. Of a queue pair's requests any one may be next, each
 * ends for itself, and a target takes them only from NICs that it has an address handle for.
 *
 * All functions: any thread. Found by dlsym.
 */
#ifndef FAKE_IBVERBS_H
#define FAKE_IBVERBS_H

#include <stdint.h>

typedef struct fake_ibverbs_stats {
    uint64_t calls; /* that can fail, of the control path: what fake_ibverbs_fail counts */
    uint64_t contexts, pds, mrs, cqs, srqs, qps, channels; /* that live */
    uint64_t posted, executed;                             /* send requests */
    uint64_t receives;                                     /* receive requests taken by immediates */
    uint64_t doorbells, longest_batch;                     /* posts, and the most requests of one */
    uint64_t inlined;                                      /* requests that carried their data */
    uint64_t rnr_naks;                                     /* an immediate came and no receive was posted */
    uint64_t cq_overruns;                                  /* completions that had no room: fatal to the queue */
    uint64_t stale;         /* completions of queue pairs that were reset or destroyed, still given */
    uint64_t handles;       /* of addresses, that live */
    uint64_t strangers;     /* datagrams from a NIC that the target has no handle for */
    uint64_t unsolicited;   /* immediates that took no receive */
    uint64_t twice;         /* datagrams that were placed a second time */
    uint64_t inflight_peak; /* bytes posted and not carried out, of the device that had most */
} fake_ibverbs_stats;

void fake_ibverbs_get_stats(fake_ibverbs_stats *stats);

/* The `kth` call from now on (1: the next) of `call`, a verb without "ibv_" ("reg_mr"), or "any", fails with `error`.
 * Others that fail only if they are named: "destroy_qp", "post_recv".
 * kth 0: none. FAKE_IBVERBS_FAIL="reg_mr:3:12" does it from outside. */
void fake_ibverbs_fail(const char *call, uint32_t kth, int error);

/* A port's state changes, with its event. `state`: enum ibv_port_state. */
void fake_ibverbs_set_port(const char *device, uint32_t port, int state);
/* A place of its table of GIDs has another one: 16 bytes; all zero: none. */
void fake_ibverbs_set_gid(const char *device, uint32_t index, const void *gid);
/* The device is gone: an event, and every request ends with IBV_WC_FATAL_ERR. */
void fake_ibverbs_kill_device(const char *device);
/* What this queue pair sends is lost: its next request runs out of retries. */
void fake_ibverbs_cut(uint32_t qp_num);
/* The next request of this queue pair ends with this status (enum ibv_wc_status), and all that it entails. */
void fake_ibverbs_break(uint32_t qp_num, int status, uint32_t vendor_err);
/* The completion queues of this queue pair stand still: nothing of it is carried out until `held` is 0. */
void fake_ibverbs_hold(uint32_t qp_num, int held);
/* From now on completions of its receives are seen only once the queue pair has gone. */
void fake_ibverbs_delay_receives(uint32_t qp_num);
/* An event says that its completion queue failed, or its shared queue of receives. */
void fake_ibverbs_fail_queue(uint32_t qp_num, int receives);
/* The next n polls of any queue fail (-EIO) and take nothing. */
void fake_ibverbs_fail_polls(uint32_t n);
/* Receives that are ready for it, in its own queue or the shared one. */
uint32_t fake_ibverbs_receives(uint32_t qp_num);
/* The queue pair that is the `index`th to have been made among those that live; 0: there is none. */
uint32_t fake_ibverbs_qp_num(uint32_t index);
/* Attributes of the last change of state of that queue pair that had some: struct ibv_qp_attr, as given. */
int fake_ibverbs_last_attr(uint32_t qp_num, int state, void *attr, int *mask);

#endif
