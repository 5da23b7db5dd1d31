"""report"""


def write_report(*a): ...
