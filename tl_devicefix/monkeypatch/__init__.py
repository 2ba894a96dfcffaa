"""Replacing parts of the installed TransformerLens, and putting back the very objects there were.

It knows no table: what is replaced is in the `patches.py` of each room, and put together in
`tl_devicefix.patches`.
"""
