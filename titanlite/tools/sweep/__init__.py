"""Many runs of one config that differ in some keys: `titanlite sweep`.

members.py   one run of them: its flags, its folder, and how it stands
runs.py      runs them: several at a time, after a kill again, without those that are done
"""
