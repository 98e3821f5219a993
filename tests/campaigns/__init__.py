"""Campaigns: what is thrown at the library at random, to see that nothing gets in and nothing gets lost.

A campaign is a module with `NAME`, with `SAMPLE`, the number of cases that plain pytest runs, and with
`cases(seed)`, an endless iterator over `Case`, the same for the same seed. `catalogue.CAMPAIGNS` lists them.

    python -m tests.campaigns --seconds 600 [--seed 3] [--only NAME]

runs on for as long as it is told, each campaign in a process of its own, and prints a table of verdicts; what
was not right is printed with what reproduces it.
"""
