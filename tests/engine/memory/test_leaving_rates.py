from engine.memory.leaving_rates import LeavingRates


def test_at_first_half_of_all_prompts_are_expected_to_be_continued():
    ((chance, kept),) = LeavingRates(20).stays[0]
    assert 0.0 < chance <= 0.5
    assert kept > 0.0


def test_a_state_serves_those_who_leave_in_its_bins_alone():
    rates = LeavingRates(20)
    for _ in range(400):
        rates.add_prompt()
        rates.add_left(2, age=5)
    rates.refresh(1000)
    assert len(rates.stays) == 3
    assert rates.stays[2][0][0] > 0.9
    assert rates.stays[2][2][0] > 0.9
    assert rates.stays[1][0][0] < 0.1


def test_what_is_left_later_is_kept_longer():
    soon, late = LeavingRates(20), LeavingRates(20)
    for _ in range(400):
        for rates, age in ((soon, 5), (late, 500)):
            rates.add_prompt()
            rates.add_left(0, age)
    soon.refresh(1000)
    late.refresh(1000)
    assert late.stays[0][0][1] > 20 * soon.stays[0][0][1]
