# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from uccl_ep import COMMAND_DTYPE, Op, decode, encode
from uccl_ep._native import ffi, lib
from uccl_ep.errors import CommandError

LIMITS = {
    name: (1 << getattr(lib, f"UCCL_EP_{name}_WIDTH")) - 1 for name in ("LOCAL", "LENGTH", "TARGET", "SLOT", "ADD")
}


def test_the_dtype_is_the_structure() -> None:
    struct = ffi.typeof("uccl_ep_command")
    assert COMMAND_DTYPE.itemsize == ffi.sizeof(struct) == 48
    assert COMMAND_DTYPE.names == tuple(name for name, _ in struct.fields)
    one = np.zeros(1, COMMAND_DTYPE)
    seen = ffi.from_buffer("uccl_ep_command[]", one)
    for value, (name, field) in enumerate(struct.fields, start=1):
        one[name] = value
        assert getattr(seen[0], name) == value
        assert COMMAND_DTYPE[name].itemsize == ffi.sizeof(field.type)


@st.composite
def commands(draw: st.DrawFn) -> dict[str, int]:
    """What an encoder must take."""

    def edge(limit: int) -> int:
        return draw(st.one_of(st.sampled_from([0, 1, limit - 1, limit]), st.integers(0, limit)))

    op = draw(st.sampled_from(list(Op)))
    command = {"op": op, "target": edge(LIMITS["TARGET"])}
    if op in (Op.PUT, Op.PUT_SIGNAL):
        granularity = draw(st.sampled_from([4, 16]))
        command |= {"granularity": granularity, "bytes": edge(LIMITS["LENGTH"]) * granularity}
        command |= {"local": edge(LIMITS["LOCAL"]) * granularity, "remote": edge(LIMITS["LOCAL"]) * granularity}
    if op == Op.PUT_SIGNAL:
        command |= {"slot": edge(LIMITS["SLOT"]), "add": edge(LIMITS["ADD"])}
    if op == Op.SIGNAL:
        command |= {"slot": edge(2**32 - 1), "add": edge(2**64 - 1)}
    return command


def as_array(command: dict[str, int]) -> np.ndarray:  # type: ignore[type-arg]
    array = np.zeros(1, COMMAND_DTYPE)
    for name, value in command.items():
        array[name] = value
    return array


@given(commands())
def test_what_fits_comes_back(command: dict[str, int]) -> None:
    array = as_array(command)
    decoded, well_formed = decode(encode(array))
    assert well_formed.all()
    assert decoded == array


@given(
    commands(), st.sampled_from(["local", "remote", "bytes", "slot", "add", "target"]), st.integers(0, 63), st.data()
)
def test_one_field_too_wide_is_refused_or_exact(
    command: dict[str, int], field: str, bit: int, data: st.DataObject
) -> None:
    """B3: it never spills into another field."""
    array = as_array(command)
    limit = 8 * COMMAND_DTYPE[field].itemsize
    value = data.draw(st.sampled_from([(1 << limit) - 1, 1 << (bit % limit), (1 << (bit % limit)) - 1]))
    array[field] = value
    note(str(array))
    try:
        words = encode(array)
    except CommandError:
        return
    decoded, well_formed = decode(words)
    assert well_formed.all()
    assert decoded == array


def test_the_first_command_that_does_not_fit_is_named() -> None:
    array = np.zeros(3, COMMAND_DTYPE)
    array["op"] = Op.SIGNAL
    array["target"][2] = 1 << 20
    with pytest.raises(CommandError, match="command 2 cannot be encoded") as caught:
        encode(array)
    assert caught.value.name == "E_RANGE"


def test_random_words_are_not_commands() -> None:
    rng = np.random.default_rng(1)
    _, well_formed = decode(rng.integers(0, 2**64, (1000, 2), np.uint64))
    # Of 8 codes two are puts, whose bits all mean something.
    assert well_formed.mean() < 0.5


@pytest.mark.parametrize("wrong", [np.zeros(4, np.uint64), np.zeros((2, 2), np.int64), np.zeros((2, 3), np.uint64)])
def test_words_of_another_shape_are_refused(wrong: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(CommandError, match=r"\[n, 2\]"):
        decode(wrong)


def test_commands_of_another_type_are_refused() -> None:
    with pytest.raises(CommandError, match="COMMAND_DTYPE"):
        encode(np.zeros(4, np.uint64))
