"""Answers each line of its standard input with the same line."""

from requests import Requests


def main() raises:
    var requests = Requests()
    while True:
        print(requests.next(), flush=True)
