"""`titanlite ladder`: what each optimisation gives, measured level by level on one config. No torch until it runs."""
