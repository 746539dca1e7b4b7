#!/bin/bash
if [ "$(cat /app/count.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
