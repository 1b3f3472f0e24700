"""`titanlite drill`: faults seeded into real runs."""
