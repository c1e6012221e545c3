"""`python -m eqx_torch`: what this installation runs on, and what looks wrong with it.

The exit status is 1 if something does, else 0.
"""

import sys

from ._diagnosis import diagnose, gather, report


def main() -> int:
    """Prints the diagnosis of this process, and gives the exit status."""
    facts = gather()
    findings = diagnose(facts)
    print(report(facts, findings))
    return int(any(finding.wrong for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
