#!/bin/bash
sed -i s/-/+/ /app/total.sh
