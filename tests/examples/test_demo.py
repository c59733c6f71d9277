"""`make demo`, which the README begins with, shows what it says."""

import re
import subprocess
import sys

DEADLINE_S = 240.0


def test_the_demo_answers_from_a_state_handed_over_and_through_the_loss_of_a_server():
    ran = subprocess.run(
        [sys.executable, "-m", "examples.demo"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "correct: yes" in ran.stdout
    assert ran.stdout.count("equal      yes") == 2
    assert re.search(r"killed +decode-\d", ran.stdout)
    assert "complete, 600 tokens" in ran.stdout
