"""What the look at folders finds."""

from testing.rooms import MAX_LINES, MAX_MODULES, faults, rooms


def room_of(folder, num_modules, num_lines=1, docstring='"""What it is."""'):
    (folder / "__init__.py").write_text(docstring)
    for number in range(num_modules):
        (folder / f"module_{number}.py").write_text("pass\n" * num_lines)
    return folder


def test_a_room_that_can_be_held_in_mind_has_no_fault(tmp_path):
    assert list(faults(room_of(tmp_path, MAX_MODULES, MAX_LINES))) == []


def test_a_full_room_a_long_module_and_one_without_a_word_are_named(tmp_path):
    (full,) = faults(room_of(tmp_path, MAX_MODULES + 1))
    assert "16 modules" in full
    for number in range(1, MAX_MODULES + 1):
        (tmp_path / f"module_{number}.py").unlink()
    (long,) = faults(room_of(tmp_path, 1, MAX_LINES + 1))
    assert "module_0.py has 451 lines" in long
    (silent,) = faults(room_of(tmp_path, 1, docstring=""))
    assert "does not say what it is" in silent
    (tmp_path / "README.md").write_text("# What it is")
    assert list(faults(tmp_path)) == []


def test_hidden_folders_and_what_is_built_are_no_rooms(tmp_path):
    for name in (".venv", "build", "engine/step"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "module.py").write_text("")
    assert list(rooms(tmp_path)) == [tmp_path / "engine" / "step"]
