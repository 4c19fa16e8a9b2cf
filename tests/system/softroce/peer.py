# SPDX-License-Identifier: Apache-2.0
"""A rank that is not ours: pyverbs alone, and what csrc/backends/verbs/wire.h says of addresses and regions.

It answers rank 0's exchanges as rank 1 of two: what both say alike it says after rank 0, and puts its own queue pair
and memory where these belong. Then it does what it is told, and says what it sees: bytes and counters, read by nobody
else's code. Messages on its input and output: a length, a letter, and that many bytes.

For the system's Python, with its package python3-pyverbs.
"""

import ctypes
import json
import os
import struct
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

HEADER = struct.Struct("=IIi20s8s256s")  # csrc/core/exchange.c
ADDRESS = struct.Struct("=IIIIHHBBBB16s")  # verbs_address
PAIR = struct.Struct("=II")
BLOB = struct.Struct("=IHHQQQI")  # and remote keys
DEPTH = 64
PSN = 0x123456
SECONDS = 60.0


def pattern(k: int, size: int) -> bytes:
    return bytes((k * 31 + i * 7 + 1) & 255 for i in range(size))


class Peer:
    def __init__(self, device: str) -> None:
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 2 * DEPTH)
        cap = QPCap(max_send_wr=2 * DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        attributes = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0)
        self.qp = QP(self.pd, attributes)
        self.gid = self.context.query_gid(1, 1)
        self.regions = {}
        self.theirs = {}
        self.address = None
        self.bad_key = False

    # ------------------------------------------------------------------------------------- as a rank that is made

    def exchange(self, data: bytes) -> bytes:
        """What rank 1 says in this step, of which `data` is what rank 0 says."""
        size = HEADER.unpack_from(data)[1]
        step = HEADER.unpack_from(data)[3].split(b"\0")[0].decode() if len(data) >= HEADER.size else ""
        payload = bytearray(data[HEADER.size : HEADER.size + size])
        if step == "addresses":
            self.addresses(payload)
        elif step == "addresses of pairs":
            self.connect(*PAIR.unpack_from(payload, PAIR.size))
            PAIR.pack_into(payload, 0, self.qp.qp_num, PSN)
        return data[: HEADER.size] + bytes(payload) + data[HEADER.size + size :]

    def addresses(self, payload: bytearray) -> None:
        """One address, then heap, signals and mailbox; each a length and room for the longest of its kind."""
        (length,) = struct.unpack_from("=I", payload)
        assert length == ADDRESS.size, length
        fields = list(ADDRESS.unpack_from(payload, 4))
        self.address = fields[:]
        fields[1] = 1  # rank
        fields[10] = bytes(int(part, 16) for part in ":".join(self.long(self.gid)).split(":"))
        ADDRESS.pack_into(payload, 4, *fields)
        at = 4 + (length + 3) // 4 * 4
        room = (len(payload) - at) // 3
        for region in range(3):
            (length,) = struct.unpack_from("=I", payload, at + region * room)
            if length:
                self.register(payload, at + region * room + 4)

    @staticmethod
    def long(gid: object) -> "list[str]":
        words = str(gid).split(":")
        return [part for word in words for part in (word.zfill(4)[:2], word.zfill(4)[2:])]

    def register(self, payload: bytearray, at: int) -> None:
        magic, nics, chunks, size, address, chunk, region = BLOB.unpack_from(payload, at)
        (key,) = struct.unpack_from("=I", payload, at + BLOB.size)
        assert (nics, chunks) == (1, 1), (nics, chunks)
        self.theirs[region] = (address, key)
        rights = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        own = MR(self.pd, size, rights | (e.IBV_ACCESS_REMOTE_ATOMIC if region == 1 else 0))
        ctypes.memset(own.buf, 0, size)
        self.regions[region] = own
        BLOB.pack_into(payload, at, magic, nics, chunks, size, own.buf, chunk, region)
        struct.pack_into("=I", payload, at + BLOB.size, own.rkey ^ (0x5500 if self.bad_key else 0))

    def connect(self, qp_number: int, psn: int) -> None:
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
        self.qp.to_init(attributes)
        text = self.address[10].hex()
        remote = GID(":".join(text[i : i + 4] for i in range(0, 32, 4)))
        attributes.ah_attr = AHAttr(gr=GlobalRoute(dgid=remote, sgid_index=1, hop_limit=64), is_global=1, port_num=1)
        attributes.dest_qp_num, attributes.rq_psn, attributes.path_mtu = qp_number, psn, e.IBV_MTU_1024
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 16, 12
        self.qp.to_rtr(attributes)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 6, 6
        attributes.sq_psn, attributes.max_rd_atomic = PSN, 16
        self.qp.to_rts(attributes)

    # --------------------------------------------------------------------------------------------- what it is told

    def word(self, slot: int) -> int:
        return ctypes.c_uint64.from_address(self.regions[1].buf + 8 * slot).value

    def watch(self, slot: int, count: int, size: int, stride: int, base: int) -> dict:
        """Until the counter is at `count`: whatever it is, the messages below it are there, whole."""
        end = time.monotonic() + SECONDS
        seen, wrong, looks = 0, [], 0
        while seen < count and time.monotonic() < end:
            now = self.word(slot)
            looks += now != seen
            for k in range(seen, min(now, count)):
                if ctypes.string_at(self.regions[0].buf + base + k * stride, size) != pattern(k, size):
                    wrong.append(k)
            seen = now
        words = [self.word(i) for i in range(16)]
        whole = ctypes.string_at(self.regions[0].buf, base + count * stride)
        outside = sum(whole[:base] != bytes(base) for _ in (0,)) + sum(
            whole[base + k * stride + size : base + (k + 1) * stride] != bytes(stride - size) for k in range(count)
        )
        return {"seen": seen, "wrong": wrong, "looks": looks, "words": words, "outside": outside}

    def put(self, slot: int, count: int, size: int, stride: int, base: int) -> dict:
        """To rank 0: each message, and an add of 1 behind it. Every add is signalled."""
        source = MR(self.pd, count * stride + 4096, e.IBV_ACCESS_LOCAL_WRITE)
        result = count * stride  # where old values come to
        heap, heap_key = self.theirs[0]
        signals, signals_key = self.theirs[1]
        statuses, posted, done = {}, 0, 0
        end = time.monotonic() + SECONDS
        for k in range(count):
            ctypes.memmove(source.buf + k * stride, pattern(k, size), size)
        while done < count and time.monotonic() < end:
            if posted < count and posted - done < DEPTH // 2:
                k = posted
                write = SendWR(k, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, send_flags=0,
                               sg=[SGE(source.buf + k * stride, size, source.lkey)])  # fmt: skip
                write.set_wr_rdma(heap_key, heap + base + k * stride)
                self.qp.post_send(write)
                add = SendWR(k, opcode=e.IBV_WR_ATOMIC_FETCH_AND_ADD, num_sge=1, send_flags=e.IBV_SEND_SIGNALED,
                             sg=[SGE(source.buf + result, 8, source.lkey)])  # fmt: skip
                add.set_wr_atomic(signals_key, signals + 8 * slot, 1, 0)
                self.qp.post_send(add)
                posted += 1
                continue
            for completion in self.cq.poll(16)[1]:
                statuses[str(completion.status)] = statuses.get(str(completion.status), 0) + 1
                done += 1
        return {"done": done, "statuses": statuses}

    def stop_answering(self) -> dict:
        self.qp.close()
        return {}


def main() -> None:
    peer = Peer(sys.argv[1])
    peer.bad_key = "bad-key" in sys.argv[2:]
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        head = source.read(5)
        if len(head) < 5:
            return
        length, kind = struct.unpack("=Ic", head)
        data = source.read(length)
        if kind == b"E":
            answer = peer.exchange(data)
        else:
            asked = json.loads(data)
            answer = json.dumps(getattr(peer, asked.pop("do"))(**asked)).encode()
        sink.write(struct.pack("=I", len(answer)) + answer)
        sink.flush()


main()
