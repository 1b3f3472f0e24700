"""What a run can switch on: a folder for each, named once in `titanlite.run.features`."""
