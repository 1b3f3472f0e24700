"""What a person and other tools see while a run goes on."""
