"""`slime-tis report`: one self-contained HTML file on a run or a dump."""
