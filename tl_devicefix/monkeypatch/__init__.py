"""Replacing parts of the installed TransformerLens, and putting back the very objects there were.

A function that replaces another is decorated by `patch.patches`; `tl_devicefix.patches` imports all
of them, and applies the table.
"""
