#!/bin/bash
. /app/total.sh
right=0
for pair in "1 2 3" "5 5 10"; do
  set -- $pair
  [ "$(total "$1" "$2")" = "$3" ] && right=$((right + 1))
done
echo "{\"reward\": $((right / 2)), \"pairs\": $right}" > /logs/verifier/reward.json
