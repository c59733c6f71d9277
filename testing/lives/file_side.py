"""What checks know of the tier of files: which starts are on their way, in which pages of host memory."""


def reservations(owned):
    """Return the pages and blocks of host memory that wait for starts from files."""
    return [fetch.reserved for fetch in owned.files.fetches.values()]


def writing(owned):
    """Return the start in host memory that is being written; None if there is none."""
    job = owned.files.writing
    return None if job is None else owned.cache.tier.start(job.start)
