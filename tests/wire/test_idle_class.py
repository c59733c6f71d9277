import os

import pytest

from wire.idle_class import LOW_NICENESS, run_behind_others


def niceness_of_a_copy(before: int) -> int:
    """Return the niceness of a copy of this process that had ``before`` and then ran behind others."""
    copy = os.fork()
    if copy == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, before)
            run_behind_others()
            os._exit(os.getpriority(os.PRIO_PROCESS, 0))
        finally:
            os._exit(99)
    _, status = os.waitpid(copy, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(("before", "after"), [(5, LOW_NICENESS), (LOW_NICENESS, LOW_NICENESS), (19, 19)])
def test_a_process_goes_behind_others_but_never_before_them(before, after):
    assert niceness_of_a_copy(before) == after
