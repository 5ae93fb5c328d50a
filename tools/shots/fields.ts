// Field options as Grafana's core applies them (its registries are not on npm): defaults, overrides, display processors.
import {cacheFieldDisplayNames, DataFrame, Field, FieldType, getDisplayProcessor, getFieldDisplayName, GrafanaTheme2, ThresholdsMode} from '@grafana/data';

function matches(matcher: {id: string; options: string}, name: string): boolean {
  return matcher.id === 'byName' ? name === matcher.options : new RegExp(`^(?:${matcher.options})$`).test(name);
}

function assign(config: any, path: string, value: unknown) {
  const [first, ...rest] = path.split('.');
  if (rest.length) assign((config[first] ??= {}), rest.join('.'), value);
  else config[first] = value;
}

// JSON has no infinity: the first threshold's null stands for it.
function openEnded(thresholds: any) {
  const steps = thresholds?.steps ?? [{value: null, color: 'green'}];
  return {mode: ThresholdsMode.Absolute, steps: steps.map((s: any, i: number) => ({...s, value: i ? s.value : -Infinity}))};
}

function configure(field: Field, name: string, panel: any) {
  const defaults = field.type === FieldType.number ? structuredClone(panel.fieldConfig.defaults) : {};
  const config: any = {...defaults, ...field.config, custom: structuredClone(panel.fieldConfig.defaults.custom ?? {})};
  for (const {matcher, properties} of panel.fieldConfig.overrides) {
    if (matches(matcher, name)) properties.forEach(({id, value}: any) => assign(config, id, value));
  }
  config.thresholds = openEnded(config.thresholds);
  return config;
}

export function apply(frames: DataFrame[], panel: any, theme: GrafanaTheme2): DataFrame[] {
  let index = 0;
  for (const frame of frames) {
    for (const field of frame.fields) {
      field.config = configure(field, getFieldDisplayName(field, frame, frames), panel);
      field.state = {...field.state, seriesIndex: field.type === FieldType.number ? index++ : 0};
      field.display = getDisplayProcessor({field, theme, timeZone: 'utc'});
      field.getLinks = () => [];
    }
  }
  cacheFieldDisplayNames(frames);
  return frames;
}
