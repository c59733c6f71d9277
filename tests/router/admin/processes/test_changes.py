"""A change that one process is asked for reaches all of them."""

import asyncio

from router.admin import changes
from router.admin.state_file import StateFile
from testing.conditions import until
from testing.router.admin_calls import get, ids, patch, post


async def own_config(sibling):
    report = sibling.app.state.processes.own_report()
    return report.config


def draining(sibling):
    workers = sibling.app.state.services.pool.workers()
    return {worker.worker_id for worker in workers if worker.drain.is_draining}


def addresses(sibling):
    return {worker.address for worker in sibling.app.state.services.pool.workers()}


async def test_each_kind_of_change_reaches_all(make_siblings):
    stack = await make_siblings()
    kept, removed = await ids(stack[0])
    assert (await post(stack[0], f"/workers/{kept}/drain"))["missing"] == []
    assert [draining(stack[i]) for i in range(3)] == [{kept}] * 3
    await post(stack[1], f"/workers/{kept}/undrain")
    await until(lambda: not any(draining(stack[i]) for i in range(3)))
    await until(lambda: not stack.decode[0].info.is_draining)
    changed = await patch(stack[2], max_choices=7, decode_policy="round_robin")
    assert (changed["max_choices"], changed["missing"], changed["warning"]) == (7, [], "")
    for index in range(3):
        config = await own_config(stack[index])
        assert (config.max_choices, config.decode_policy) == (7, "round_robin")
    await post(stack[0], "/workers", 201, address="127.0.0.1:9", role="prefill")
    assert all("127.0.0.1:9" in addresses(stack[i]) for i in range(3))
    assert (await stack[1].client.delete(f"/admin/v1/workers/{removed}")).status_code == 200
    assert all(stack.decode[1].address not in addresses(stack[i]) for i in range(3))
    assert await ids(stack[2]) == [kept]
    refused = await patch(stack[1], 400, max_choices=0)
    assert "stay as they were" in refused["error"]["message"]
    assert (await own_config(stack[0])).max_choices == 7


async def test_changes_at_the_same_moment_end_in_one_state(make_siblings):
    stack = await make_siblings()
    (worker, _) = await ids(stack[0])
    for _ in range(5):
        await asyncio.gather(
            *(patch(stack[i], max_queue=10 + i, max_choices=20 + i) for i in range(3)),
            *(post(stack[i], f"/workers/{worker}/{what}") for i, what in enumerate(("drain", "undrain"))),
        )
        configs = [await own_config(stack[i]) for i in range(3)]
        assert configs == [configs[0]] * 3
        assert configs[0].max_choices == configs[0].max_queue + 10, "one of the three, whole"
        assert stack[0].ledger == stack[1].ledger == stack[2].ledger
        ((state, _),) = [values for place, values in stack[0].ledger.items() if place[0] == "workers"]
        wanted = {worker} if state == "draining" else set()

        def is_settled(wanted=wanted, drains=state == "draining"):
            alike = all(draining(stack[i]) == wanted for i in range(3))
            return alike and stack.decode[0].info.is_draining == drains

        await until(is_settled)


async def test_a_process_that_restarts_has_the_changes(make_siblings):
    stack = await make_siblings()
    kept, removed = await ids(stack[0])
    await post(stack[1], f"/workers/{kept}/drain")
    await stack[0].client.delete(f"/admin/v1/workers/{removed}")
    await patch(stack[0], max_choices=7)
    await stack.routers.stop(1)
    missed = await patch(stack[0], max_queue=5)
    assert missed["missing"][0]["process"] == 1
    assert "it gets the change when it answers again" in missed["warning"]
    await stack.routers.start(1)
    config = await own_config(stack[1])
    assert (config.max_choices, config.max_queue) == (7, 5)
    assert stack.decode[1].address not in addresses(stack[1])
    await until(lambda: draining(stack[1]) == {kept})
    assert (await get(stack[1], "/workers"))["missing"] == []


async def test_a_process_that_missed_a_change_gets_it_soon(make_siblings, monkeypatch):
    """As one that was frozen while the others were told."""
    monkeypatch.setattr(changes, "CATCH_UP_INTERVAL_S", 0.05)
    stack = await make_siblings()
    of_last = stack[2].app.state.processes.siblings
    stack[0].app.state.changes._siblings.ports.pop(2)  # the first does not know the last
    assert (await patch(stack[0], max_queue=5))["missing"] == []
    assert of_last.ports

    async def has_it():
        return (await own_config(stack[2])).max_queue == 5

    await until(has_it)


async def test_all_processes_save_in_one_file_and_the_newest_change_stays(make_siblings, tmp_path):
    path = tmp_path / "state.db"
    stack = await make_siblings(state_file=path)
    await asyncio.gather(*(patch(stack[i], max_queue=10 + i) for i in range(3)))
    held = (await own_config(stack[0])).max_queue

    async def is_saved():
        return StateFile(path).load().settings == {"max_queue": held}

    await until(is_saved)
    for index in range(3):
        await stack.routers.stop(index)
    await stack.routers.start(1)  # alone: nobody but the file can tell
    assert (await own_config(stack[1])).max_queue == held
