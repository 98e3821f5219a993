"""Campaigns: what is thrown at the library at random, to see that nothing gets in and nothing gets lost.

A campaign is a module with `NAME`, with `SAMPLE`, the number of cases that plain pytest runs, and with
`cases(seed)`, an endless iterator over `Case`, the same for the same seed; `__main__.CAMPAIGNS` lists them.
`python -m tests.campaigns --seconds 600 [--seed 3] [--only NAME]` runs on, prints what was not right with
what reproduces it, and a table of verdicts.
"""
