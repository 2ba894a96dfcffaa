"""Replace parts of the installed TransformerLens, and restore the very objects that were there.

A function that replaces another is decorated by `patch.patches`; `tl_devicefix.patches` imports all
of them, and applies the table.
"""
