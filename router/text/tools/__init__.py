"""Reads tool calls and reasoning out of a model's text while it comes.

A parser is a small state machine for one format. It gets the text in pieces of any size, and gives each part on as soon
as it is certain what it is: a content, or a call's name, or a piece of its arguments.
"""
