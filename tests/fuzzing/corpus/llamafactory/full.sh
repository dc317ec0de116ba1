accelerate launch --num_processes 8 --config_file fsdp.yaml src/train.py \
  --model_name_or_path meta-llama/Llama-3.2-1B --stage dpo --pref_loss orpo \
  --finetuning_type full --cutoff_len 4096 --per_device_train_batch_size 2 \
  --gradient_accumulation_steps 4 --optim adamw_torch --bf16 true --deepspeed ds_z2.json
