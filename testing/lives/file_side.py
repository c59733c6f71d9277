"""What checks know of the tier of files: which starts are on their way, in which pages of host memory."""


def reservations(owned):
    """Return the pages and blocks of host memory that wait for starts from files."""
    return [fetch.reserved for fetch in owned.files._fetches.values()]


def writing(owned):
    """Return the start in host memory that is being written; None if there is none."""
    return owned.files._writing
