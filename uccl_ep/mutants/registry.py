# SPDX-License-Identifier: Apache-2.0
"""The mutants. Those of the NIC are faults of the mutant backend (csrc/mutation) or knobs of a virtual NIC, those of
the core its fault points, those of the device faults of device.h, and programs are callers that rely on what the
contract does not say. Those of the vendor are faults of a backend over libibverbs (csrc/backends/verbs/fault.h) on the
lab's NICs (uccl_ep.lab): each breaks a rule of the vendor's, and is killed by nothing but the words in which the
vendor's own library, or the NIC, tells of that.

Those without a profile run on a NIC with manners: it is slow, takes parts of batches, has no room at times. What is
broken then shows for longer than an instant, and a suite that is clean on the same NIC without the fault has been shown
to ask for no more than the contract.
"""

from __future__ import annotations

from dataclasses import dataclass

# Options of the mutant backend.
SLOW = "lazy=200,partial=30,again=10"
DISORDER = "lazy=200,again=10,disorder=1"
# For a case that looks between any two operations: nothing is left to chance, or to who runs when.
STEP = "step=1"
STEP_DISORDER = "step=1,disorder=1"
FAILING = "lazy=500,fail=30"
FAILING_DISORDER = "lazy=500,fail=30,disorder=1"
PROMPT = ""

# Clauses that say that something ends: there a wait that does not end in time is the finding.
ABOUT_HANGING = frozenset({"PRG-1", "PRG-2", "PRG-3", "ERR-1", "ERR-5", "ABT-1", "QUI-3"})


@dataclass(frozen=True, order=True)
class Ground:
    """What a mutant and its baseline run on."""

    nic: str
    profile: str = ""
    strategy: str = "auto"  # asked for
    kernels: bool = False  # the lane gpu, on the CPU's emulation
    heap: str = "host"  # or "device", which virtual NICs do not reach: staged
    vendor: str = ""  # the lane provider: the backend and the variant of its NIC, as in "efa:efa3"

    def __str__(self) -> str:
        words = [self.vendor, self.profile, self.nic, "" if self.strategy == "auto" else self.strategy]
        words.append("posted by kernels" if self.kernels else "")
        words.append("staged heaps" if self.heap == "device" else "")
        return ", ".join(filter(None, words)) or "no disturbance"


@dataclass(frozen=True)
class Mutant:
    place: str  # "nic", "core", "device" (device.h), "program" or "vendor"
    fault: str  # its name there
    clause: str
    what: str
    nic: str = SLOW  # options of the mutant backend; with a profile: knobs
    first: tuple[str, ...] = ()  # cases to begin with: saves time, decides nothing
    time_scale: float = 1.0  # of deadlines; less where the finding is that something takes for ever
    profile: str = ""  # of a virtual NIC that must break it
    strategy: str = "auto"
    heap: str = "host"
    vendor: str = ""
    says: str = ""  # of the vendor's: what the failure must say

    @property
    def name(self) -> str:
        on = self.profile or self.vendor.partition(":")[2]
        return f"{self.place}.{self.fault}" + (f"@{on}" if on else "")

    @property
    def ground(self) -> Ground:
        return Ground(self.nic, self.profile, self.strategy, self.place == "device", self.heap, self.vendor)


def _nic(fault: str, clause: str, what: str, *first: str, nic: str = SLOW, time_scale: float = 1.0) -> Mutant:
    return Mutant("nic", fault, clause, what, nic, first, time_scale)


def _core(fault: str, clause: str, what: str, *first: str, nic: str = SLOW, time_scale: float = 1.0) -> Mutant:
    return Mutant("core", fault, clause, what, nic, first, time_scale)


def _device(fault: str, clause: str, what: str, *first: str, nic: str = PROMPT, time_scale: float = 1.0) -> Mutant:
    return Mutant("device", fault, clause, what, nic, first, time_scale)


def _virtual(
    place: str,
    fault: str,
    clause: str,
    what: str,
    profile: str,
    *first: str,
    knobs: str = "",
    strategy: str = "auto",
    time_scale: float = 1.0,
    heap: str = "host",
) -> Mutant:
    return Mutant(place, fault, clause, what, knobs, first, time_scale, profile, strategy, heap)


def _vendor(fault: str, clause: str, what: str, vendor: str, first: str, says: str) -> Mutant:
    # Receives that are not there are not waited for; where nothing is broken there are enough.
    nic = "rnr_retry=0" if vendor.startswith("efa") else PROMPT
    return Mutant("vendor", fault, clause, what, nic, (first,), 5.0, vendor=vendor, says=says)


MUTANTS: tuple[Mutant, ...] = (
    _nic("stale_source", "PUB-1", "does not read again a source that it has read before",
         "pub1.handed_to_another_thread"),
    _core("post_part_of_batch", "PUB-2", "posts a part of a batch", "pub1.tickets_count_up"),
    _nic("put_short", "PUT-1", "leaves out the last granule of every 7th put", "put1.sizes"),
    _nic("put_stray", "PUT-1", "writes one byte too many with every 7th put", "put1.sizes"),
    _nic("put_torn", "PUT-1", "places the second half of every 3rd put later", "put1.sizes"),
    _core("drop_split_tail", "PUT-1", "does not send the last piece of a put that it split", "put1.small_operations"),
    _core("merge_across_gap", "PUT-1", "merges puts whose sources are not adjacent", "put1.neighbours"),
    _nic("target_must_run", "PUT-2", "does not execute puts to a process that is stopped", "put2.stopped_target",
         time_scale=0.3),
    _nic("source_read_again", "PUT-3", "reads sources once more after the next completion",
         "put3.not_read_after_quiet_source"),
    _nic("offset_32_bits", "PUT-4", "cuts target offsets to 32 bits", "put4.beyond_4_gib"),
    _nic("length_16_bits", "PUT-4", "cuts lengths to 16 bits", "put4.largest_command"),
    _core("wrap_offset_4g", "PUT-4", "cuts target offsets to 32 bits where a put is posted", "put4.beyond_4_gib"),
    _core("truncate_length", "PUT-4", "cuts lengths to 16 bits where a put is posted", "put4.largest_command"),
    _nic("older_put_wins", "PUT-5", "places a put that it called complete after the next one to the same bytes",
         "put5.complete_then_again"),
    _nic("self_unordered", "PUT-6", "applies signals to the own rank before earlier puts", "put6.alone"),
    _nic("late_duplicate", "PUT-7", "lets bytes arrive again after later ones to the same place",
         "put7.two_epochs_back"),
    _nic("signal_lost", "SIG-1", "does not apply every 31st signal", "sig1.back_to_back",
         time_scale=0.3),
    _nic("signal_doubled", "SIG-1", "applies every 31st signal twice", "sig1.back_to_back"),
    _nic("signal_32_bits", "SIG-1", "adds the low 32 bits of a signal", "sig1.exact_sum"),
    _nic("signal_beside", "SIG-1", "adds every 31st signal to the next word", "sig1.back_to_back",
         time_scale=0.3),
    _core("signal_lost_in_batch", "SIG-1", "drops the second of two signals to one word", "sig1.back_to_back",
         time_scale=0.3),
    _nic("signal_overtakes", "SIG-2", "applies signals before earlier puts", "sig2.step_by_step", nic=STEP),
    _core("signal_before_put", "SIG-2", "submits the signal of a put_signal before its put", "sig2.step_by_step",
          nic=STEP),
    _core("signal_not_held", "SIG-2", "does not hold a signal back on a NIC without order", "sig2.step_by_step",
          nic=STEP_DISORDER),
    _nic("signal_between", "SIG-3", "applies the signal of a put_signal before its put", "sig2.step_by_step",
         nic=STEP),
    _core("channels_collide", "SIG-4", "lets a signal add nothing while another channel has commands under way",
          "sig4.many_to_one"),
    _nic("signals_swapped", "SIG-5", "swaps signals that follow each other", "sig2.step_by_step", nic=STEP),
    _core("signals_reordered", "SIG-5", "swaps signals of a batch", "sig2.step_by_step", nic=STEP),
    _core("wait_consumes", "SIG-6", "takes what a wait waited for out of the word", "sig6.equal_is_enough",
          time_scale=0.3),
    _core("strategy_unchecked", "SIG-7", "takes a strategy whose needs the NIC does not promise", "sig7.strategy",
          nic=DISORDER),
    _nic("source_read_late", "QUI-0", "reads the source after the completion",
         "put3.not_read_after_quiet_source"),
    _core("source_at_take", "QUI-0", "reports sources free when commands are taken", "sig2.step_by_step", nic=STEP),
    _nic("complete_at_submit", "QUI-1", "completes operations before they are executed", "sig2.step_by_step",
         nic=STEP),
    _core("complete_at_submit", "QUI-1", "reports commands complete when they are submitted", "sig2.step_by_step",
          nic=STEP),
    _core("quiet_one_channel", "QUI-2", "waits for channel 0 alone in a quiet over all",
          "qui2.one_channel_outstanding"),
    _core("poll_never_done", "QUI-3", "never tells a poll that a ticket is done", "qui3.wait_poll_drop",
          time_scale=0.3),
    _virtual("core", "wait_holds_ring", "QUI-3", "takes nothing that is posted behind a ticket that is waited for",
             "connectx", "qui3.posts_pass_a_wait"),
    _core("idle_quiet_waits", "QUI-4", "lets a quiet wait although nothing is outstanding", "qui4.nothing_outstanding"),
    _nic("acknowledged_not_visible", "QUI-5", "completes puts that were acknowledged but are not visible",
         "qui5.third_rank"),
    _core("heap_limit_unchecked", "MEM-1", "takes a heap larger than commands can address", "mem1.heap_too_large"),
    _nic("other_memory", "MEM-2", "writes also into the memory of another communicator", "mem2.canaries_under_load"),
    _nic("word_before_bytes", "MEM-3", "applies signals while bytes are on their way", "sig2.step_by_step", nic=STEP),
    _nic("doorbell_forgotten", "PRG-1", "lets the last operation wait for the next", "prg1.no_further_call",
         time_scale=0.3),
    _nic("completions_stop", "PRG-1", "gives no completion after the 20th", "prg1.counters", time_scale=0.3),
    _nic("completion_lost", "PRG-1", "does not give every 61st completion", "prg1.counters", nic=DISORDER,
         time_scale=0.3),
    _core("starve_last_channel", "PRG-2", "serves the last channel when the others are empty", "prg2.last_channel",
          nic=PROMPT),
    _core("overwrite_full_ring", "PRG-3", "lets producers overwrite a full ring", "prg3.two_slots", time_scale=0.3),
    _core("give_up_unnoticed", "PRG-3", "leaves a channel open whose producer gave up", "prg3.gives_up",
          time_scale=0.3),
    _nic("sequence_16_bits", "LIM-1", "takes the operation on which 16 bits wrap for a duplicate",
         "lim1.operations_16_bits"),
    _core("ticket_of_32_bits", "LIM-1", "compares the low 32 bits of tickets", "lim1.tickets_2_32"),
    _core("window_of_16_bits", "LIM-1", "publishes 16 bits of what is complete", "lim1.operations_16_bits",
          time_scale=0.3),
    _core("value_not_distance", "LIM-1", "compares signals as plain numbers", "lim1.signal_words"),
    _core("reserve_race", "THR-1", "reserves tickets in two steps", "thr1.eight_producers", time_scale=0.3),
    _core("deadline_ignored", "ERR-1", "does not look at deadlines", "err1.deadlines", time_scale=0.2),
    _nic("failure_hidden", "ERR-2", "completes failed operations as if they had succeeded", "err2.success_means_done",
         nic=FAILING),
    _core("error_swallowed", "ERR-2", "retires failed commands as if they had succeeded", "err2.record"),
    _core("record_missing", "ERR-2", "keeps no record of a failure", "err2.record"),
    _nic("failure_passed", "ERR-3", "executes what is behind a failed operation", "err3.behind_a_failure",
         nic=FAILING),
    _core("signal_after_failure", "ERR-3", "sends the signals behind a failed put", "err3.behind_a_failure",
          nic=FAILING_DISORDER),
    _core("no_range_check", "ERR-4", "does not compare offsets with the heap", "err2.record"),
    _core("malformed_kills_all", "ERR-4", "closes the whole channel for one malformed command",
          "err4.only_this_target"),
    _nic("loss_hidden", "ERR-5", "does not report a dead peer", "err5.others_unharmed", time_scale=0.3),
    _nic("loss_spreads", "ERR-5", "reports the loss of one peer as the loss of all", "err5.others_unharmed"),
    _core("loss_closes_all", "ERR-5", "closes all peers for the loss of one", "err5.others_unharmed"),
    _nic("old_operations", "ERR-6", "executes operations of the old connection on the new one", "err6.after_failures",
         nic=FAILING, time_scale=0.3),
    _core("no_incarnation", "ERR-6", "executes commands to a closed target", "err6.closed_until_reset"),
    _core("words_kept", "ERR-6", "keeps the sums of signals over a reset", "err6.closed_until_reset"),
    _core("abort_ignored", "ABT-1", "does not look at the abort in waits", "abt1.final", time_scale=0.3),
    _core("abi_not_checked", "ABI-1", "takes a backend of any ABI", "abi1.other_version"),
    # Kernels, on the emulation of a GPU.
    _device("no_fence", "PUB-1", "posts without a fence before it", "pub1.lanes_write"),
    _device("parity_in_one_word", "PUB-1", "marks one word of a command as new", "pub1.lanes_write", time_scale=0.3),
    _device("lanes_wait_alone", "PUB-2", "lets each lane of a warp reserve, and wait for room, by itself",
            "pub2.warps_on_two_slots", time_scale=0.3),
    _device("overwrite_full_ring", "PRG-3", "stores to a slot that is not free", "prg3.two_slots", time_scale=0.3),
    _device("give_up_unnoticed", "PRG-3", "does not tell that a reserved ticket was given up",
            "err1.kernel_without_a_proxy", time_scale=0.3),
    _device("deadline_ignored", "ERR-1", "does not look at deadlines", "err1.kernel_misses_a_signal", time_scale=0.2),
    _device("quiet_source_early", "QUI-0", "takes a source for free one command early",
            "qui2.one_channel_outstanding"),
    _device("quiet_early", "QUI-1", "takes a ticket for complete one command early", "qui2.one_channel_outstanding"),
    _device("quiet_one_channel", "QUI-2", "waits for channel 0 alone in a quiet over all",
            "qui2.one_channel_outstanding"),
    _device("poll_never_done", "QUI-3", "never tells a poll that a ticket is done", "qui3.wait_poll_drop",
            time_scale=0.3),
    _device("loss_ignored", "ERR-5", "waits on for a rank that is lost", "err5.others_unharmed", time_scale=0.3),
    _device("loss_of_any_ends", "ERR-5", "ends a wait for one rank by the loss of another", "err5.others_unharmed"),
    _device("failure_ignored", "ERR-2", "waits on where a command failed", "err2.kernel_waits_for_a_failure",
            time_scale=0.3),
    _device("value_not_distance", "LIM-1", "compares signals as plain numbers", "lim1.signal_words"),
    _device("abort_ignored", "ABT-1", "does not look at the abort in waits", "abt1.kernel_spins", time_scale=0.3),
    # What is wrong on one NIC and right, or unseen, on another: each on the profile that breaks it.
    _virtual("program", "flag_after_data", "PUT-5", "puts data, then a flag behind it, and polls the flag", "efa"),
    _virtual("program", "source_changed_early", "PUT-3", "stores to a source once the target has the data", "efa3",
             knobs="dup_write=100"),
    _virtual("program", "target_rewritten_early", "PUT-7", "stores to a slot before its put is complete", "efa3",
             knobs="dup_write=100"),
    _virtual("core", "source_at_take", "PUT-3", "reports sources free when commands are taken", "efa3",
             "put3.not_read_after_quiet_source"),
    _virtual("core", "complete_at_submit", "PUT-7", "reports commands complete when they are submitted", "efa3",
             "put7.complete_is_final"),
    _virtual("core", "transmit_is_visible", "MEM-3", "takes what was transmitted for visible", "cxi",
             "mem3.complete_is_visible"),
    _virtual("core", "flush_skipped", "MEM-3", "adds signals without the flush that their payload needs", "efa",
             "mem3.late_visibility"),
    _virtual("core", "signal_not_held", "SIG-2", "does not hold a signal back until puts are visible", "cxi",
             "sig2.chunks_in_order"),
    _virtual("core", "strategy_unchecked", "SIG-2", "relies on order where relaxed ordering took it away",
             "connectx-ro", "sig2.chunks_in_order"),
    _virtual("core", "strategy_unchecked", "SIG-7", "adds by a NIC that has no adds", "pollara-noatomic",
             "sig7.strategy"),
    _virtual("core", "inflight_unlimited", "PRG-1", "does not keep to the NIC's bytes in flight", "thor2",
             "prg1.bytes_in_flight"),
    _virtual("core", "mailbox_unsequenced", "SIG-2", "adds a record when it comes, whatever is missing before it",
             "efa", "sig2.chunks_in_order"),
    _virtual("core", "return_word_ignored", "SIG-1", "takes what was sent to a mailbox for applied", "efa",
             "pub1.stores_before_post"),
    _virtual("core", "two_sums_in_flight", "SIG-1", "stores the next sum while the last one is under way",
             "strawman-min", "pub1.handed_to_another_thread", strategy="sender_hold_sum"),
    _virtual("core", "one_bank", "SIG-6", "lets several NICs add to one word", "connectx", "sig4.many_proxies",
             knobs="nics=4"),
    _virtual("core", "applied_before_copied", "SIG-2", "adds a signal before its bytes are copied to the heap", "efa",
             "sig2.chunks_in_order", heap="device"),
    _virtual("core", "applied_before_copied", "SIG-2", "adds a signal before its bytes are copied to the heap",
             "strawman-min", "sig2.chunks_in_order", heap="device"),
    _virtual("core", "sent_before_copied", "PUT-1", "sends a put before its source is copied to host memory", "cxi",
             "pub2.as_large_as_the_ring", heap="device"),
    _virtual("nic", "key32", "MEM-1", "cuts keys of 64 bits to 32", "cxi", "mem1.reached_by_all"),
    _virtual("nic", "queues", "MEM-1", "gives queues that it does not have", "efa", "mem1.queues_of_a_nic"),
    _vendor("not_unsolicited", "SIG-1", "sends immediates without a receive to a queue pair that takes none such",
            "efa:efa3", "sig1.add_of_zero", "no receive posted for an immediate"),
    _vendor("late_handle", "PUT-2", "makes the handle of a peer when something is first sent to it",
            "efa:efa3", "put2.idle_target", "it has no address handle for it"),
    _vendor("unsignalled", "QUI-1", "posts requests without a completion", "efa:efa3", "sig1.add_of_zero",
            "(errno 22)"),
    _vendor("past_queue", "PUT-1", "posts more requests than the queue holds", "efa:efa3", "put1.cut_in_pieces",
            "(errno 12)"),
    _vendor("responders_unshared", "MEM-1", "asks for all responder resources of the NIC, for each queue pair",
            "pollara:pollara", "mem1.reached_by_all", "share its responder resources"),
)  # fmt: skip


def by_name(name: str) -> list[Mutant]:
    """The mutants of a name, with or without its place."""
    return [m for m in MUTANTS if name in (m.name, m.name.partition("@")[0], m.fault)]
