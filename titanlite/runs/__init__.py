"""What a run leaves in its folder, and how to list and compare runs. No torch here: these answer at once anywhere."""
