"""Traced rounds and a chunk (traced_round.py), as a program of its own.

python bench/h200/trace.py --json REPORT    # adds "traces" to the report, and pictures beside it
"""

from traced_round import main

if __name__ == "__main__":
    main()
