"""`titanlite drill`: faults rehearsed on a small copy of a run. No torch here but in the ranks themselves."""
