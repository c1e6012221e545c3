from .checks import CHECKS as CHECKS, diagnose as diagnose, Finding as Finding
from .facts import Facts as Facts, gather as gather, VARIABLES as VARIABLES
from .text import report as report
