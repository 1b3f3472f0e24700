"""Experts in models: what the families that have MoE layers share.

    arguments.py   arguments of such a decoder, their checks and their counts
    family.py      initial weights, their division over ranks, `expert_spec`
    hf_names.py    Hugging Face's names of experts
    layer.py       the MoE layer in place of a feed-forward, with its block and decoder
    router.py      which experts a token goes to, and the losses that balance them
    grouped.py     rows sorted by expert, and products of each expert's rows with its matrix

`arguments.py`, `family.py` and `hf_names.py` import no torch. The families are beside this folder.
What ranks do with experts is in `titanlite.features.experts`.
"""
