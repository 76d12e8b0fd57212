"""The race of docs/race.md: sparse attention at equal FLOPs, with seeds.

`legs` says what is compared, `points` which runs that takes, `training` trains and scores them, `archive` keeps them,
`ranking` and `tables` compare them.
"""
