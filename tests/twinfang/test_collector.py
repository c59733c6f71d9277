"""Garbage collection while a process starts."""

from __future__ import annotations

import gc

import pytest

from twinfang.collector import collector_paused


def test_nothing_is_collected_inside_and_what_exists_at_the_end_is_left_alone():
    before = gc.get_freeze_count()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_an_error_resumes_collections():
    try:
        with pytest.raises(RuntimeError), collector_paused():
            raise RuntimeError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
