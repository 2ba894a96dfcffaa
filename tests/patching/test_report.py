"""What `report()` returns: the table that it prints, for programs."""

from __future__ import annotations

import tl_devicefix
from tl_devicefix.patching.versions import installed


def test_it_returns_what_it_prints(capsys):
    told = tl_devicefix.report()
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert len(told) == len(lines)
    for patch, line in zip(told, lines):
        assert line.split()[0] == patch.target
        assert line.endswith(patch.why)
        assert f"{patch.since} - {patch.until}" in line
    assert str(told.version) == str(installed())
    assert told.is_applied
    assert head.endswith(f"{installed()}: applied")


def test_it_knows_when_nothing_is_applied():
    with tl_devicefix.unpatched():
        told = tl_devicefix.report()
    assert not told.is_applied
    assert told == tl_devicefix.report()


def test_a_notebook_does_not_show_the_table_twice():
    told = tl_devicefix.report()
    expected = f"PatchReport({len(told)} patches of transformer_lens {installed()}, applied)"
    assert repr(told) == expected
