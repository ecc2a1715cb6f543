"""Reading what vendor tools print: nouns, small readings and the layouts that several tools share.

What is special about one vendor stands in its own file beside this package.
"""
