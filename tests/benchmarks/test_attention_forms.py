"""The rule that ends the question of two forms, on rows as a device would give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks import attention_forms
from benchmarks.attention_forms import KERNELS, Verdict, deletions, main, promote, verdicts
from fastformer.kernels import _attention_hopper as hopper

RIGHT = [{"key": "tests hopper", "ok": True}]


def row(direction: str, head_dim: int, speedup: float, *, own: bool, seqlen: int = 8192, **more: Any) -> dict[str, Any]:
    shape = {"head_dim": head_dim, "seqlen": seqlen}
    kernels = [KERNELS[direction] if own else "_attention_fwd_kernel"]
    return {
        "op": "attention", "provider": "fastformer", "mode": direction, "shape": shape, "dtype": "bfloat16",
        "device": "H100", "speedup": speedup, "kernels": kernels, **more,
    }  # fmt: skip


def decided(plain: list[Any], own: list[Any], steps: list[Any] = RIGHT) -> dict[tuple[int, str], str]:
    return {(each.head_dim, each.direction): each.decision for each in verdicts(plain, own, steps)}


def test_fast_and_right_is_promoted_and_all_else_that_was_measured_goes() -> None:
    plain = [row("fwd", 64, 4.0, own=False), row("fwd", 128, 5.0, own=False), row("bwd", 64, 3.0, own=False)]
    own = [row("fwd", 64, 4.6, own=True), row("fwd", 128, 5.7, own=True), row("bwd", 64, 3.9, own=True)]
    found = decided(plain, own)
    assert [found[form] for form in ((64, "fwd"), (128, "fwd"), (64, "bwd"))] == ["promote", "delete", "promote"]
    # Slower at one length, however fast at another.
    plain.append(row("bwd", 64, 3.0, own=False, seqlen=2048))
    own.append(row("bwd", 64, 2.9, own=True, seqlen=2048))
    assert decided(plain, own)[64, "bwd"] == "delete"
    assert set(decided(plain, own, [{"key": "tests hopper", "ok": False, "failed": ["a"]}]).values()) == {"delete"}


def test_what_no_device_has_compared_stays_open() -> None:
    plain, own = [row("fwd", 64, 4.0, own=False)], [row("fwd", 64, 9.0, own=True)]
    assert decided(plain, own)[64, "fwd"] == "promote"
    for others in (
        [row("fwd", 64, 9.0, own=True, device="H200")],
        [row("fwd", 64, 9.0, own=True, seqlen=512)],
        [row("fwd", 64, 9.0, own=False)],  # the plain form ran
        [row("fwd", 64, 9.0, own=True, provider="sdpa flash")],
        [],
    ):
        assert decided(plain, others)[64, "fwd"] == "open"
    assert decided(plain, own, [])[64, "fwd"] == "open"


def test_deletions_are_named_by_what_is_left() -> None:
    def of(*decisions: str) -> list[str]:
        forms = ((64, "fwd"), (128, "fwd"), (64, "bwd"), (128, "bwd"))
        return deletions([Verdict(*form, [], decision, "") for form, decision in zip(forms, decisions, strict=True)])

    assert of(*["promote"] * 4) == [] == of("open", "open", "promote", "open")
    (line,) = of("promote", "delete", "promote", "promote")
    assert "128" in line and " takes " in line
    assert any("hopper_backward" in line for line in of("promote", "promote", "delete", "delete"))
    assert any("gluon_emulator" in line for line in of(*["delete"] * 4))
    for text in attention_forms._FILES.values():
        for name in text.split(", "):
            assert (attention_forms.ROOT / name).is_file(), name


def test_promotions_are_written_where_kernels_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    switch = attention_forms._SWITCH
    assert promote(switch.read_text(), sorted(hopper.PROMOTED)) == switch.read_text()
    copy = tmp_path / switch.name
    copy.write_text(switch.read_text())
    monkeypatch.setattr(attention_forms, "_SWITCH", copy)
    monkeypatch.setattr(attention_forms, "ROOT", tmp_path)
    for name, rows in (
        ("cuda.jsonl", [row("fwd", 64, 4.0, own=False)]),
        ("cuda_hopper.jsonl", [row("fwd", 64, 5.0, own=True)]),
        ("gpu_run_plan.jsonl", RIGHT),
    ):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert main([str(tmp_path), "--apply"]) == 2  # head_dim 128 stays open
    assert "64 fwd: promote" in capsys.readouterr().out
    scope: dict[str, Any] = {}
    line = next(line for line in copy.read_text().splitlines() if line.startswith("PROMOTED"))
    exec("from __future__ import annotations\n" + line, scope)
    assert scope["PROMOTED"] == {(64, "fwd")}
    with pytest.raises(ValueError, match="PROMOTED"):
        promote("nothing", [])
