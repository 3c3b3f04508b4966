"""Whether a machine does what training needs: facts, known faults as rules, and checks that measure.

`facts.py` is what is known of a machine, `gather.py` learns it through the parsers of `parse.py`, `rules.py` judges it by
`rules.toml`. `checks.py` runs `probes.py` in child processes and judges what they measured. Nothing here changes a machine.
"""
