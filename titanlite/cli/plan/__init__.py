"""`titanlite plan`, its trace, its page and its search."""
