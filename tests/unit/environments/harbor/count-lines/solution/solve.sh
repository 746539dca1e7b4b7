#!/bin/bash
wc -l < "/app/data/$KIND.txt" > /app/count.txt
